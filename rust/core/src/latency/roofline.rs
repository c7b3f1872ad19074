//! The roofline model.
