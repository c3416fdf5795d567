"""Do the operators do on this device what the reference does: ``python -m pacache_torch verify``.

For someone with hardware. Read it in this order: ``vectors`` (worked examples, each number computed independently),
``sweep`` (made-up calls for every row of `capabilities`, and at the edges of what a device takes), ``calls`` (how a
call is moved to a device and how its memory is compared), ``run`` (the outcome of each case), ``timing``, ``report``
and ``cli``.
"""
