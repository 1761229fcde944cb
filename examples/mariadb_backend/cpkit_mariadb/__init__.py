"""Agent state in MariaDB, Galera or MySQL; the module `store` has the manual."""

from cpkit_mariadb.store import MariaDBOptions, MariaDBStore

__all__ = ["MariaDBOptions", "MariaDBStore"]
