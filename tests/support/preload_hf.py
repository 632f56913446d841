"""Imported by the server of the tests' ranks, where a test of Hugging Face models was collected."""

import transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.mistral.modeling_mistral
import transformers.models.qwen2.modeling_qwen2
import transformers.models.swin.modeling_swin
import transformers.models.t5.modeling_t5  # noqa: F401
