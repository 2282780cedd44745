"""Arithmetic of both releases, without SGLang. The groups ``delta`` (0.5.10.post1) and ``lead``
(0.5.23) adapt it to their schedulers."""
