"""Mixed-head block-sparse attention. Knows arrays and head plans, not models; `api` is the only public entry."""
