"""What lies below HiCache's host pages: how a page is kept in a store, and stores that fail.

``parts``     the parts of a page (K and V; a latent; latent and index), their keys and memory
``stores``    the storage backends of this release on top of that, one mixin each, and the factory
              that puts them on
``guard``     every call of a store with a deadline: faults become misses and failures
``health``    whether a store is asked, and when it is probed
``worker``    the threads that the calls run on

The mixins are used where the host pool is a stage (``is_stage`` is true on it); elsewhere the
backends are SGLang's own.
"""
