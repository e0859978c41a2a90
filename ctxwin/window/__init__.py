"""The window: an immutable state, edits on it, lanes, assembly, and asking.

Modules, in an order to read them:

- `window` is what users call: `Window`, with its attributes in `reader` and rarer work in `maintenance`; `async_window` is the
  same, awaited.
- `core` keeps its versions: `state` is one, `edits` are pure functions from one to the next, `placement` has their parts that
  need the engine, `invariants` what holds in each; `leases` keep stored what the newest one needs.
- `lanes` chooses how each chunk is served (`choice`), from what is stored, what its KV has absorbed (`antecedents`, `survival`,
  `difference`, `edited_text`) and what each lane costs (`prices`); `continuation` is what the next choice takes over.
- `assembly` turns lanes into KV, a `layout` for the engine: it reads the store (`reading`) and forms patches and other kinds of
  KV (`orbits`, `merging`, `recurrent`, `in_place`); `storage_policy` chooses what is kept.
- `ask` asks: a question becomes an `answer`, streamed by `stream`, told to observers as `events`; `tools`, `toolcalls` and
  `lookups` are for answers that call something.
- `idle` computes ahead of the next ask, by `prediction`; `forecast`, `sliding` and `reordering` price what has not been asked.
- `protocols` are the contracts of what a window is given, `defaults` its policies if it is given none, `auditing` that of audits.
"""
