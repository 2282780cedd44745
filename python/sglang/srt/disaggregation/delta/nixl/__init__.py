"""NIXL on top of the delta protocol and the transfer workers.

``manager``       the thin override of SGLang's NIXL manager, which all others hang on
``endpoints``     sender and receiver, as SGLang's schedulers know them; what has arrived of a room
``backend``       how a worker posts it, asks for its state and lets go of it
``peers``         the decode ranks that NIXL knows, and the lists prepared for each
``layout``        where the bytes lie on either side, of a rank's pools and of one chunk
``descriptors``   the arrays that NIXL takes: pure numpy
``agent``         how SGLang's NIXL agent is made; whether the installed NIXL will do
"""
