"""Studies: measurements behind single claims, run from a checkout. They are not part of the installed package.

| command, in the root of a checkout | what it measures                                                                        |
|------------------------------------|-----------------------------------------------------------------------------------------|
| ``python -m evals.studies.drift``       | how far answers drift from a re-prefill as a window slides, with and without refresh |
| ``python -m evals.studies.gaps``        | survivors that keep their positions (vLLM's RFC #51948) or move together             |
| ``python -m evals.studies.toggles``     | toggling chunks clean and back; telling which chunks are disposable                  |
| ``python -m evals.studies.serving_gap`` | what a patch costs on vLLM, beside what vLLM and transformers differ by              |
| ``python -m evals.studies.elastic``     | Elastic Cache's own claims: perplexity, ROUGE-L and speed over KV budgets            |
| ``python -m evals.studies.serve``       | windows and users of vLLM's prefix cache on one vLLM under a rising request rate     |
| ``python -m evals.studies.canonical``   | canonicals behind the system prompt, behind another one, or behind a neutral prefix  |
| ``python -m evals.studies.predicted``   | patches predicted for neighbours that a chunk was never seen with                    |
| ``python -m evals.studies.economy``     | chunks that a small store holds for many windows, with and without patches   |
| ``python -m evals.studies.gate``        | whether a divergence threshold could gate reuse, over the samples of a run           |
| ``python -m evals.studies.chats``       | agents that send their history again, with and without windows behind their chats    |
| ``python -m evals.studies.hybrid``      | what a trained hybrid answers from states composed of its chunks' maps               |
| ``python -m evals.studies.states``      | moving a hybrid's chunk by its map, beside a forward over it                         |
| ``python -m evals.studies.live``        | a live stream, the last frames sent again, and vLLM's own streaming input            |

Modules import one another relatively, so that they work under this name and as ``ctxwin.evals.studies``.
"""
