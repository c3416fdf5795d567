"""A small decoder that serves text through a paged KV cache: ``python -m pacache_torch demo``.

Read it in this order: ``pacache_torch.blocks`` (who owns which block), ``scheduler`` (what runs in
a step), ``paged_cache`` (the two operators), ``model`` (a decoder that only knows ``write`` and
``read``), ``serve`` (the loop). ``dense_cache`` and ``check`` are the proof that it is right,
``cli`` and ``report`` the command.
"""
