"""The APM demonstration: an application like any other, made of kivi's public names.

``python -m apm_demo`` (``make demo``) runs the whole of it, on one machine, offline::

    load --HTTP--> service --files--> Spark: live_job --.                        .--> its console in a browser
    (measured)     8 endpoints                           }--gRPC--> kivi serve --{
    data/*.csv -----------files-----> Spark: trace_job -'                        '--> proof <-- the same files
    (a real trace)                    killed twice

* ``demo`` is the story and starts everything; ``children`` are the processes, ``say`` is what the person sees.
* ``cluster`` is the same traffic on three nodes (``make cluster-demo``), of which one is killed.
* ``service`` and ``load``: a real web service under real load, whose response times are measured. ``tracing``: the same
  calls by OpenTelemetry's SDK, where ``service --otlp`` sends them.
* ``landing`` and ``trace``: files, complete when they appear.
* ``tables``: what is declared in kivi, as what its console shows it, and when an invocation is an anomaly.
* ``jobs``, with ``live_job`` and ``trace_job``: what Spark runs.
* ``proof``: recounts the files and compares, at one snapshot.
* ``reconcile`` (``make reconcile``), with ``recompute``: the same in Spark, as a job that a person can schedule.

Nothing here may import more of kivi than ``kivi``, ``kivi.spark`` and ``kivi.errors``.
"""
