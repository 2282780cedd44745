"""Policies of both releases: memory, and the choice and chunks of local turns. The groups ``delta``
(0.5.10.post1) and ``lead`` (0.5.23) adapt them to their schedulers.
"""
