"""Mooncake: SGLang's backend with the delta protocol.

``manager``    the thin override of SGLang's Mooncake manager
``endpoints``  sender and receiver, as SGLang's schedulers know them
``messages``   what peers send to either side; what has arrived of a room
``worker``     moves the chunks of one queue, with synchronous calls of the engine, each in its time
"""
