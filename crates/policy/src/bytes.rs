use crate::{Error, Result};

const UNITS: [(&str, u64); 10] = [
    ("", 1),
    ("B", 1),
    ("KB", 1000),
    ("MB", 1000_u64.pow(2)),
    ("GB", 1000_u64.pow(3)),
    ("TB", 1000_u64.pow(4)),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// Reads a byte size: `512MiB`, `1.5 GB` (rounded to whole bytes) or a plain number. Units in any case.
pub fn parse_bytes(text: &str) -> Result<u64> {
    let trimmed = text.trim();
    let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = (&trimmed[..end], trimmed[end..].trim_start());
    let bytes = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).and_then(|&(_, size)| {
        let whole = || number.parse::<u64>().ok()?.checked_mul(size);
        let fraction = || number.parse::<f64>().ok().map(|n| (n * size as f64).round());
        match number.contains('.') {
            false => whole(),
            true => fraction().filter(|&b| size > 1 && b < u64::MAX as f64).map(|b| b as u64),
        }
    });
    bytes.ok_or_else(|| Error::InvalidBytes(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::parse_bytes;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("1024", 1024),
            ("7B", 7),
            ("512MiB", 512 << 20),
            ("1.5GB", 1_500_000_000),
            ("1.5 GiB", 3 << 29),
            ("2kb", 2000),
            ("2KIB", 2048),
            (" 3 TB ", 3_000_000_000_000),
            ("1TiB", 1 << 40),
            (".5KiB", 512),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn no_sizes() {
        for text in
            ["", "MiB", "-1", "+1", "1e3", "nan", "inf", "1.5", "1.2.3MB", ".", ".MB", "5M", "20000000TiB", "1 2MB"]
        {
            let message = parse_bytes(text).expect_err(text).to_string();
            assert_eq!(message, format!("`{text}` is not a byte size; write it like 512MiB, 1.5GB or 4096"));
        }
    }
}
