//! Pages: one self-contained HTML file each, with its data, its script and its style inside.

use crate::error::Result;
use serde_json::Value;

const STYLE: &str = include_str!("pages/page.css");
const SHARED: &str = include_str!("pages/page.js");

/// A page's own script.
#[derive(Debug, Clone, Copy)]
pub enum Page {
    /// Memory over a step.
    Timeline,
    /// Memory against time.
    Frontier,
}

impl Page {
    fn script(self) -> &'static str {
        match self {
            Page::Timeline => include_str!("pages/timeline.js"),
            Page::Frontier => concat!(include_str!("pages/frontier.js"), include_str!("pages/heatmap.js")),
        }
    }

    /// The page with its data.
    pub fn fill(self, title: &str, data: &Value) -> Result<String> {
        let json = serde_json::to_string(data)?.replace('<', "\\u003c"); // so that no text in it ends the element
        let title = title.replace('&', "&amp;").replace('<', "&lt;");
        let script = self.script();
        Ok(format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
             <style>\n{STYLE}</style>\n</head>\n<body>\n<main id=\"page\"></main>\n\
             <noscript>This page draws itself with a script that is part of it.</noscript>\n\
             <script type=\"application/json\" id=\"data\">{json}</script>\n\
             <script>\n{SHARED}{script}</script>\n</body>\n</html>\n"
        ))
    }
}
