"""Host code in C++ that XLA calls: built on first use, by the system's compiler, into a folder of the user's."""
