//! Arrivals, lengths, presets and trace formats for kvrelay.
