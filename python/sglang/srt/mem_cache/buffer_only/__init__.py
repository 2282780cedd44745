"""``--hicache-host-memory-mode buffer_only``: host memory as a staging buffer before the store.

KV goes device -> stage -> store (backup) and store -> stage -> device (prefetch, load back); no
node of the tree has a host copy. What a node has in the store is noted on it, and a node that
leaves the device leaves the tree.

``settings``    sizes of the staging buffer and its shares (pure), limits, and where they come from
``stage``       the staging pages: who has which; copies between device and stage

``page_parts``        the parts of a page (K and V; a latent; latent and index), keys and memory
``storage_backends``  what storage backends of a staging buffer share, and their factory
``storage_files``     SGLang's ``file``
``storage_mooncake``  Mooncake
``store_client``      calls of a store with a deadline; the circuit breaker
``call_threads``      the threads of these calls
``namespaces``        whose KV a page is: model, weights, layout, tenant; keys
``images``            the full hashes of a prompt's images, which are in its keys
``page_store``        pages in and out of the store, and the threads that wait for it

``backup_queue``  what waits to be written; marks on the nodes
``backup``      device to stage to store
``touch``       what is used on the device is kept warm in the store, or written again
``prefetch``    what a request wants of the store, and what of it is in the staging buffer
``waiting_line``   the order in which their requests wait, and what is due when
``prefetch_states``  from state to state, and out
``prefetch_line``  all of them, in that order: store to stage, state by state
``query``       what the store has of a prompt
``fetch``       pages on their way from the store into the buffer; the first follows its query
``patience``    how long a step gives answers to come, there
``worth``       load or recompute (pure); ``chooser``: with what a rank has measured
``load_back``   fetched pages enter the device tree at admission, and are copied there
``context``     what these share
``pipelines``   backup and prefetch of a rank, and the step that drives them
``metrics``     what is reported; how long a request was in which state
``host_pool``, ``index_pool``, ``tree``, ``scheduler``, ``weight_updates``  mixins for SGLang's
"""
