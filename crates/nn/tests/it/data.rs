use crate::Scratch;
use retape_core::meta;
use retape_nn::Error;
use retape_nn::data::{ByteText, decode, encode};

#[test]
fn the_built_in_text() {
    let text = ByteText::moby_dick();
    assert!(text.bytes().starts_with(b"CHAPTER 1. Loomings.\n\nCall me Ishmael."));
    assert!(std::str::from_utf8(text.bytes()).is_ok());
    assert_eq!(text.bytes().len(), 999_783);
}

#[test]
fn tokens_and_text() {
    assert_eq!(encode("a\u{2014}"), [97, 226, 128, 148]);
    assert_eq!(decode(&[97, 226, 128, 148]).unwrap(), "a\u{2014}");
    assert_eq!(decode(&[97, 226]).unwrap(), "a\u{fffd}");
    assert_eq!(decode(&[97, 256]).unwrap_err().to_string(), "token 256 at position 1 is no byte (0 to 255)");
    assert!(decode(&[-1]).is_err());
}

#[test]
fn wrong_files() {
    let scratch = Scratch::new("data");
    let missing = ByteText::from_file(scratch.path("none.txt")).unwrap_err();
    assert!(matches!(&missing, Error::File { action: "read", .. }));
    assert!(missing.to_string().starts_with("can't read "), "{missing}");

    let path = scratch.path("latin1.txt");
    std::fs::write(&path, b"caf\xe9 au lait").unwrap();
    let error = ByteText::from_file(&path).unwrap_err();
    assert!(matches!(&error, Error::NotUtf8 { offset: 3, .. }), "{error}");

    let path = scratch.path("short.txt");
    std::fs::write(&path, "12345678").unwrap();
    let text = ByteText::from_file(&path).unwrap();
    assert!(text.batches(7, 1, 0).is_ok());
    let error = text.batches(8, 1, 0).unwrap_err().to_string();
    assert!(error.ends_with("short.txt has 8 bytes; a sequence of 8 needs at least 9"), "{error}");
    assert!(matches!(text.batches(0, 1, 0), Err(Error::Input { .. })));
    assert!(matches!(text.batches(1, 0, 0), Err(Error::Input { .. })));
    assert!(matches!(ByteText::from_text("empty", "").batches(1, 1, 0), Err(Error::TextTooShort { bytes: 0, .. })));
}

#[test]
fn batches_are_pure_functions_of_seed_and_step() {
    let text = ByteText::moby_dick();
    let batches = text.batches(32, 4, 7).unwrap();
    let seventh = batches.batch(7);
    assert_eq!(text.batches(32, 4, 7).unwrap().batch(7), seventh);
    assert_ne!(batches.batch(8), seventh);
    assert_ne!(text.batches(32, 4, 8).unwrap().batch(7), seventh);
    assert_eq!(seventh.tokens.len(), 128);
    for row in 0..4 {
        let row = row * 32..(row + 1) * 32;
        let (tokens, targets) = (&seventh.tokens[row.clone()], &seventh.targets[row]);
        assert_eq!(tokens[1..], targets[..31], "a target is the next token");
        let window: Vec<u8> = tokens.iter().chain(&targets[31..]).map(|&t| t as u8).collect();
        assert!(text.bytes().windows(33).any(|w| w == window), "a window of the text");
    }
    let (tokens, targets) = seventh.tensors(&meta()).unwrap();
    assert_eq!((tokens.shape(), targets.shape()), (&[4, 32][..], &[4, 32][..]));
}

/// Every start is drawn, the first and the last too, about equally often.
#[test]
fn windows_start_everywhere() {
    let text = ByteText::from_text("digits", "0123456789");
    let batches = text.batches(4, 16, 3).unwrap();
    let mut counts = [0usize; 6];
    for step in 0..500 {
        let batch = batches.batch(step);
        batch.tokens.chunks(4).for_each(|window| counts[window[0] as usize - b'0' as usize] += 1);
    }
    // 8000 draws of 6: 1333 expected, standard deviation 33.
    assert!(counts.iter().all(|&c| (1150..1520).contains(&c)), "{counts:?}");
}

#[test]
fn consecutive_windows_cover_the_text() {
    let text = ByteText::from_text("digits", "0123456789");
    let batches = text.batches(3, 2, 0).unwrap();
    let first = batches.consecutive(0).unwrap();
    assert_eq!(first.tokens, encode("012345"));
    assert_eq!(first.targets, encode("123456"));
    let last = batches.consecutive(1).unwrap();
    assert_eq!((last.tokens, last.targets), (encode("678"), encode("789")));
    assert_eq!(batches.consecutive(2), None);
    assert_eq!(batches.consecutive(usize::MAX), None);
}
