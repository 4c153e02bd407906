"""V:N:M sparsity: blocks of V rows share four of each M columns, and each row keeps two of these four."""
