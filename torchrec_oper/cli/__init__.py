"""The ``oper`` command: ``main`` finds the subcommand, each of which is one module."""
