//! The computation graph: operations, shapes, planning, execution.
