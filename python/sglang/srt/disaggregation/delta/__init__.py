"""The disaggregation layer: a turn moves only the pages that decode lacks (sglang#19746).

Prefill and decode exchange prefixes, rooms that end early, and pages, over NIXL or Mooncake. What
both sides share lies here; what one of them does in ``prefill`` and ``decode``; what only a
transfer library needs in ``nixl`` and ``mooncake``.

A third transfer backend goes into a folder beside ``nixl``: a ``Backend`` of
``prefill/transfer_backend.py`` (post, ask for the state, release, complete), and thin overrides of
SGLang's manager, sender and receiver for it, as rows in ``patchset/table.py``.
"""
