"""What torch has to be; looked at before anything of it is used."""

import torch

OLDEST = "2.12"

if torch.__version__ < OLDEST:
    raise ImportError(
        f"torch_tp2d needs torch {OLDEST} or later, and this is {torch.__version__}: before it "
        f"gradients of a compiled block come out wrong, those of an uneven DTensor are replicated, "
        f"and attention on such DTensors hangs. pip install 'torch>={OLDEST}'"
    )
