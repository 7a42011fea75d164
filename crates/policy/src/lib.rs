//! Rules, presets and (later) the planner.
