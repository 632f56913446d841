"""The state of a running step: the tokens under way, and transfers that outlive a module.

:class:`~torch_tp2d.runtime.context.Context` holds it, one for each mesh. A
:class:`~torch_tp2d.runtime.prefetch.Pass` is one forward of a model, in which weights are gathered
ahead; a :class:`~torch_tp2d.runtime.reductions.Backward` is one backward, in which reductions of
parameters' gradients are deferred.
"""
