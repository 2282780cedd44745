"""NIXL on top of the delta protocol and the transfer workers.

``prefill``       the manager's half of a prefill rank, and the sender: queues chunks for workers
``decode``        the manager's half of a decode rank, and the receiver: what has arrived of a room
``manager``       the two halves in one class, as SGLang has it
``backend``       how a worker posts a chunk, asks for its state and lets go of it
``peers``         the decode ranks that NIXL knows, and the lists prepared for each
``layout``        where the bytes of a rank's pools lie on either side
``descriptors``   what a chunk is, and the arrays that NIXL takes: pure numpy
``agent``         how SGLang's NIXL agent is made; whether the installed NIXL will do
"""
