"""What a step keeps while it runs: the tokens under way, and transfers that outlive a module.

:class:`~torch_tp2d.runtime.context.Context` is the object that holds it, one for a mesh. A
:class:`~torch_tp2d.runtime.prefetch.Pass` is one forward of a model, in which weights are gathered
ahead; a :class:`~torch_tp2d.runtime.reductions.Backward` is one backward, in which the gradients of
parameters are reduced late.
"""
