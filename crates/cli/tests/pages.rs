//! The pages in a real browser, without a window: their scripts run to the end and react to a pointer.
//!
//! Skipped where there is no Chromium: `RETAPE_CHROMIUM` names one, else `PATH` is searched.

mod common;

use common::*;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn browser() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("RETAPE_CHROMIUM") {
        let named = PathBuf::from(named);
        assert!(named.is_file(), "RETAPE_CHROMIUM is {}, which is no file", named.display());
        return Some(named);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let found =
        std::env::split_paths(&path).flat_map(|dir| names.map(|name| dir.join(name))).find(|file| file.is_file());
    if found.is_none() {
        eprintln!("skipped: no chromium in PATH, and RETAPE_CHROMIUM isn't set");
    }
    found
}

/// The page's elements after its script and then `probe` have run.
fn dom(browser: &Path, page: &Path, probe: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(page).unwrap();
    let probed = dir.path().join("page.html");
    let probe = format!("<script>{{{probe}\ndocument.body.dataset.probed = 'true';}}</script>\n</body>");
    fs::write(&probed, text.replace("</body>", &probe)).unwrap();
    let output = dir.path().join("dom.html");
    let mut child = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"])
        .args(["--disable-component-update", "--disable-sync", "--no-first-run", "--window-size=1200,1600"])
        .arg(format!("--user-data-dir={}", dir.path().join("profile").display()))
        .arg("--dump-dom")
        .arg(format!("file://{}", probed.display()))
        .stdin(Stdio::null())
        .stdout(File::create(&output).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    loop {
        if child.try_wait().unwrap().is_some() {
            break;
        }
        if start.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("the browser didn't finish");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let dom = fs::read_to_string(output).unwrap();
    let body = dom.split("<body").nth(1).unwrap_or(&dom).split('>').next().unwrap_or("").to_owned();
    assert!(body.contains(r#"data-ready="true""#), "the script didn't reach its end: {body}");
    assert!(!body.contains("data-error"), "{body}");
    assert!(body.contains(r#"data-probed="true""#), "{body}");
    assert!(body.contains(r#"data-phone="true""#), "{body}");
    dom
}

/// It needs nothing from anywhere.
fn assert_self_contained(page: &Path) {
    let text = fs::read_to_string(page).unwrap().replace("http://www.w3.org/2000/svg", "");
    for word in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!text.contains(word), "{word} in {}", page.display());
    }
}

/// Draws the page again in a frame as wide as a phone, and fails where something in it is wider.
const ON_A_PHONE: &str = "
    const frame = document.createElement('iframe');
    frame.style = 'width: 400px; height: 800px; border: 0';
    const [style, data, script] = ['style', '#data', '#data + script'].map((s) => document.querySelector(s).outerHTML);
    frame.srcdoc = `<!DOCTYPE html><head>${style}</head><body><main id='page'></main>${data}${script}</body>`;
    frame.onload = () => {
        const inner = frame.contentDocument;
        if (inner.body.dataset.ready !== 'true') throw new Error('not drawn on a phone');
        const width = inner.documentElement.scrollWidth;
        if (width > 400) throw new Error(`the page is ${width} wide on a phone`);
        for (const text of inner.querySelectorAll('.chart svg text')) {
            const box = text.getBoundingClientRect();
            if (box.left < 0 || box.right > 400) throw new Error(`${text.textContent} sticks out`);
        }
        document.body.dataset.phone = 'true';
    };
    document.body.append(frame);
";

/// No label of a chart lies on another.
const APART: &str = "
    const texts = [...document.querySelectorAll('.chart svg text')];
    const boxes = texts.map((t) => [t.textContent, t.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
        const w = Math.min(p.right, q.right) - Math.max(p.left, q.left);
        const h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
        if (w > 2 && h > 4) throw new Error(`${a} lies on ${b}`);
    }));
";

#[test]
fn the_timeline_draws_itself() {
    let Some(browser) = browser() else { return };
    let dir = tempfile::tempdir().unwrap();
    for policy in ["selective", "int8_all", "none"] {
        let page = dir.path().join(format!("{policy}.html"));
        let args = ["timeline", "--json", "--policy", policy, "--out", page.to_str().unwrap()];
        let document = &json_lines(&run_small(&args))[0];
        assert_self_contained(&page);
        let probe = format!(
            "{APART}
            const box = document.querySelector('.chart').getBoundingClientRect();
            const move = {{ clientX: box.left + box.width * 0.7, clientY: box.top + 150, bubbles: true }};
            document.querySelector('.chart').dispatchEvent(new PointerEvent('pointermove', move));
            if (document.querySelector('.tip').hidden) throw new Error('no tip');
            document.body.dataset.tip = document.querySelector('.tip').textContent;
            document.querySelector('tbody button').click();
            if (document.querySelectorAll('tr.part:not([hidden])').length < 2) throw new Error('no parts');
            document.querySelector('.chart').dispatchEvent(new KeyboardEvent('keydown', {{ key: 'ArrowLeft' }}));
            {ON_A_PHONE}"
        );
        let dom = dom(&browser, &page, &probe);
        let events = document["events"]["bytes"].as_array().unwrap().len();
        assert!(dom.contains(&format!(r#"data-points="{events}""#)), "{events} events");
        assert!(dom.contains("data-tip=") && dom.contains("backward"), "the tip names the phase");
        assert!(dom.contains("What is live at the peak"));
    }
}

#[test]
fn the_frontier_draws_itself_and_a_click_shows_marks() {
    let Some(browser) = browser() else { return };
    let dir = tempfile::tempdir().unwrap();
    let peers = dir.path().join("peers.json");
    let peer = r#"[{"engine":"other","label":"full <b>checkpointing</b></script>",
        "peak_bytes":3000000,"overhead_percent":31.5}]"#;
    fs::write(&peers, peer).unwrap();
    for device in ["cpu", "meta"] {
        let out = dir.path().join(device);
        let args = ["frontier", "--json", "--steps", "1", "--device", device, "--out", out.to_str().unwrap()];
        let args = [&args[..], &["--policies", "none,selective,full_per_layer,int8_all,selective_ffn"]].concat();
        let args = [&args[..], &["--peers", peers.to_str().unwrap()]].concat();
        let document = &json_lines(&run_small(&args))[0];
        let page = out.join("frontier.html");
        assert_self_contained(&page);
        let probe = format!(
            "{APART}
            const before = document.body.dataset.chosen;
            const button = [...document.querySelectorAll('td button')].find((b) => b.textContent !== before);
            button.click();
            if (document.body.dataset.chosen !== button.textContent) throw new Error('not chosen');
            const cells = document.querySelectorAll('.split svg rect');
            if (cells.length < 10 || cells.length % 2) throw new Error(`${{cells.length}} cells`);
            const marks = new Set([...document.querySelectorAll('.chart svg circle, .chart svg rect')].map((c) => [
                c.getBoundingClientRect().left + c.getBoundingClientRect().width / 2,
                c.getBoundingClientRect().top + c.getBoundingClientRect().height / 2,
            ]));
            const [x, y] = [...marks][0];
            const move = new PointerEvent('pointermove', {{ clientX: x, clientY: y }});
            document.querySelector('.chart').dispatchEvent(move);
            if (document.querySelector('.tip').hidden) throw new Error('no tip');
            document.querySelector('.chart').dispatchEvent(new MouseEvent('click', {{ clientX: x, clientY: y }}));
            document.querySelector('.legend input')?.click();
            document.querySelector('.legend input')?.click();
            {ON_A_PHONE}"
        );
        let dom = dom(&browser, &page, &probe);
        let points = document["points"].as_array().unwrap().len() + 1;
        assert!(dom.contains(&format!(r#"data-points="{points}""#)), "{points} points");
        assert!(dom.contains("other full &lt;b&gt;checkpointing"), "a label is text, never markup");
        assert!(dom.contains("transformer.h.*.mlp.gelu"));
    }
}
