"""The disaggregation layer: a turn moves only the pages that decode lacks (sglang#19746).

Prefill and decode exchange prefixes, early ends of rooms, and pages, over NIXL or Mooncake. This
folder has the code of both sides; ``prefill`` and ``decode`` that of one side; ``nixl`` and
``mooncake`` that of one transfer library.

A third transfer backend goes into a folder beside ``nixl``: a ``Backend`` of
``prefill/transfer_backend.py`` (post, query the state, release, complete), and thin overrides of
SGLang's manager, sender and receiver for it, as rows in ``patchset/table.py``.
"""
