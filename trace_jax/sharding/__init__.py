"""One training run on many devices: the mesh, and which device holds which part of what."""
