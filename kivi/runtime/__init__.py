"""What every room may use of the process that it runs in, and nothing about data.

    settings     the tunables of a store, frozen, with units in their names
    checksum     CRC-32, with the fastest implementation that the machine has
    files        when a disk is full, and a directory whose names a crash leaves as they are
    forks        what an object does when its process is forked
    threads      the threads behind a channel, and their end
    imports      packages that a process does without
    histogram    how often something took how long, counted where it happens
    scheduling   threads that no request waits for, told to the system
    ahead        calls that run ahead of whoever takes their results, in threads of the process

Comes in: nothing. Goes out: small tools. May not touch: any other room of kivi but ``errors``.
Begin reading at ``settings``: its fields are the published limits of a store.
"""
