"""What travels between a client and a server, for both ends.

    v1        generated from ``proto/kivi/v1`` by ``proto/generate.py``; never edited
    codec     single values and predicates between stored form and messages
    columns   rows in a message, by columns
    methods   the names of the calls, and how a channel is set up
    status    the one table between kivi's errors and gRPC's status codes

Comes in: values in stored form, or a message. Goes out: the other of the two. May not touch: files, and any room above
``encoding``. Begin reading at ``proto/kivi/v1/session.proto``.
"""
