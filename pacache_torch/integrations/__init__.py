"""The operators under the names and in the places where other projects look for them.

Nothing here is imported by the package itself, and none of the other projects is needed to install it.
"""
