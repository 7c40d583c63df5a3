"""A request on its way: prompt, generation, and the parts of its answer."""
