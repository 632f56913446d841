"""Imported by the server of the tests' ranks, where a test of the integrations was collected."""

import contextlib

import transformers.core_model_loading
import transformers.models.auto.modeling_auto  # noqa: F401

import torch_tp2d.integrations.transformers  # noqa: F401

with contextlib.suppress(ModuleNotFoundError):
    import lightning.pytorch  # noqa: F401
