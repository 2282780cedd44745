"""``--hicache-host-memory-mode buffer_only``: host memory as a transient stage before the store.

KV goes device -> stage -> store and store -> stage -> device; no node of the tree has a host copy.
What a node has in the store is noted on it, and a node that leaves the device leaves the tree.

``sizing``      how many staging pages, and whose: pure
``stage``       the staging pages: leases that end once
``marks``       what a tree node knows about its copy in the store
``intents``     pending writes: bounded, once a node, in order
``namespaces``  keys of pages: tenants, adapters and salts never meet
``agreement``   what the ranks of one server agree on in a step, in one reduction: pure
``lanes``       the threads that wait for the store
``store``       pages in and out of the guarded store
``copies``      copies between device and stage
``settings``    limits, and where they come from
``parts``       what both pipelines work with; the pin
``writes``      the write pipeline
``read_state``  a prefetch and its states
``search``      how much of a prompt the store has
``reads``       the read pipeline
``loads``       copies of what was fetched, from the stage to the device
``publish``     fetched pages enter the device tree
``pipelines``   both, and the step that drives them
``metrics``     what is reported
``host_pool``, ``controller``, ``tree``, ``scheduler``  the mixins for SGLang's classes
"""
