"""Measurements that are worth repeating, run from a checkout. They are not part of the installed package.

| command, in the root of a checkout | what it measures                                                                        |
|------------------------------------|-----------------------------------------------------------------------------------------|
| ``python -m evals.studies.drift``       | how far answers drift from a re-prefill as a window slides, with and without refresh |
| ``python -m evals.studies.chats``       | agents that resend their history in every chat request, with and without windows     |
| ``python -m evals.studies.beside``      | short chats beside agents, and plain traffic beside windows and on a full cache      |
| ``python -m evals.studies.overhead``    | what a server adds to plain chats, with and without windows, beside vLLM's own       |
| ``python -m evals.studies.hybrid``      | answers of a trained hybrid from states composed of its chunks' maps                 |
| ``python -m evals.studies.soak``        | memory of a server over half an hour of plain chats and windows                      |
| ``python -m evals.studies.live``        | a live stream, and the last frames resent as a chat                                  |
| ``python -m evals.studies.fleet``       | edits and answers of a fleet whose replicas are killed or replaced                   |
| ``python -m evals.studies.scale``       | a simulated fleet of 1,000 replicas, and asks of windows that did not move           |
| ``python -m evals.studies.released``    | text, facts and pictures on released models, served in every way, beside the floor   |
| ``python -m evals.studies.removals``    | a window that slides at every question, with and without removal patches             |
| ``python -m evals.studies.clock``       | chunks that keep their KV behind an edit                                             |
| ``python -m evals.studies.linked``      | files linked in one step: requests, steps, time and answers                          |
| ``python -m evals.studies.trust``       | questions that turn against a promoted way, and plain requests beside audits         |
| ``python -m evals.studies.promotions``  | how often promotions err on simulated streams, and how long they take                |

Settled studies, whose answers stand in tables, are in the commit that the table names.
"""
