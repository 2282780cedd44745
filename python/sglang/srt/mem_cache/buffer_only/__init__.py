"""``--hicache-host-memory-mode buffer_only``: host memory as a transient stage before the store.

KV goes device -> stage -> store and store -> stage -> device; no node of the tree has a host copy.
What a node has in the store is noted on it, and a node that leaves the device leaves the tree.

``sizing``      how many staging pages, and whose: pure
``settings``    limits, and where they come from
``stage``       the staging pages: leases that end once
``copies``      copies between device and stage
``namespaces``  keys of pages: tenants, adapters and salts never meet
``page_parts``  the parts of a page (K and V; a latent; latent and index), their keys and memory
``agreement``   what the ranks of one server agree on in a step, in one reduction: pure

``store_client``     every call of a store with a deadline: faults become misses and failures
``circuit_breaker``  whether a store is asked, and when it is probed
``call_threads``     the threads that the calls run on
``page_store``       pages in and out of the store
``lanes``            the threads that wait for it
``storage_backends``, ``storage_factory``  a storage backend of this release on the parts of a page
``storage_eic``, ``storage_file``, ``storage_hf3fs``, ``storage_mooncake``, ``storage_nixl``  each

``parts``       what both pipelines work with; the pin
``marks``       what a tree node knows about its copy in the store
``intents``     pending writes: bounded, once a node, in order
``backup``      the write pipeline
``read_state``  a prefetch and its states
``search``      how much of a prompt the store has
``prefetch``    the read pipeline
``load_back``   copies of what was fetched, from the stage to the device
``publish``     fetched pages enter the device tree
``pipelines``   both, and the step that drives them
``metrics``     what is reported
``host_pool``, ``controller``, ``tree``, ``scheduler``  the mixins for SGLang's classes
"""
