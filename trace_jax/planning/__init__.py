"""What a model needs on which GPUs, by arithmetic: memory, record, transfer, decode speed, meshes. Nothing here is measured."""
