//! The virtual-time driver of the kvrelay scheduler, and searches over it.
