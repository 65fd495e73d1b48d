//! Compute kernels per instruction set, chosen at run time.
