"""The Triton kernels and their device functions. Nothing here knows jax: `<op>/triton.py` binds each kernel."""
