"""Python imports this at the start of every process that has this folder on its ``PYTHONPATH``.

The processes of a server inherit the variable. A refusal costs one line on stderr.
"""

import cpu_standin

cpu_standin.install()
