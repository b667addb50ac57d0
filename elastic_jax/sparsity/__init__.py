"""How sparse heads choose their blocks. (Streaming heads choose nothing: their rule is in `elastic_jax.plan`.)"""
