"""Why an update was not taken."""


class WeightsRefused(ValueError):
    """Something is wrong with an update. Nothing was replaced; the engine goes on with the weights it has."""


class WeightsDamaged(RuntimeError):
    """Loading failed halfway: the engine holds neither the old weights nor the new ones and must be started again."""
