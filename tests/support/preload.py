"""Imported once by the server from which the tests' ranks are forked."""

import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.testing._internal.distributed._tensor.common_dtensor  # noqa: F401

import torch_tp2d  # noqa: F401
