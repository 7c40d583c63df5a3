"""From a name to a model that runs: weights, device, and what is measured of it."""
