"""The command line ``tokenspeed`` (also ``ts``): one module a command, each imported only when it is the one that runs."""
