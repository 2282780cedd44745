"""What makes later turns and full servers faster, on SGLang 0.5.23's own transfer.

That release has the decode radix cache, delta transfer and deferred release itself. Each part here
wraps a few of its methods, is off by default, and is switched on by a variable.

``attach``           which parts are on; the methods that they wrap, checked before any is replaced
``prefill_exit``     prefill's half of a request that decode computes; early aborts
``local``            turns that decode computes: the choice, admission, chunks
``local_chunk``      them as SGLang's batches
``local_scheduler``  the methods of SGLang's scheduler around them
``without_prefill``  requests whose prefill server is lost
``thread``           NIXL's progress thread waits for events instead of spinning
``admission``        reserves what each request can still generate
``resume``           of it: a retracted request comes back with what the tree holds of its prompt
"""
