//! The engine on a tiny model: requests, measured runs, faults, laws.

#[path = "../shared/belief.rs"]
mod belief;
mod common;
mod doubles;
mod faults;
mod laws;
mod measured;
mod replays;
mod requests;
mod text;
