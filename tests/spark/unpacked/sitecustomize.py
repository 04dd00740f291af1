"""Python takes PySpark from where pip installed it, and not from the archive that Spark puts first on the path.

Both are the same, but of an archive each process compiles what it imports: half a second of each of Spark's Python
processes. Every interpreter that has this folder on its path reads this file as it starts.
"""

import sys

sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]
