//! The compiled kernels: embedded where nvcc was there as this crate was built, else read from a folder.

use std::borrow::Cow;
use std::path::Path;

/// Overrides the folder that the kernels' images are read from.
const VARIABLE: &str = "RETAPE_CUDA_KERNELS";

/// Each source file's name, without its ending, and its image.
pub(crate) type Images = Vec<(&'static str, Cow<'static, [u8]>)>;

// Written by build.rs: `FILES`, the names of kernels/*.cu, and `EMBEDDED`, their images or None.
include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// The images from `folder`, else from the folder that the environment names, else those embedded.
pub(crate) fn images(folder: Option<&Path>) -> Result<Images, String> {
    let variable = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
    let folder = folder.or(variable.as_deref().map(Path::new));
    match (folder, EMBEDDED) {
        (Some(folder), _) => {
            let read = |file: &&'static str| {
                let path = folder.join(format!("{file}.fatbin"));
                let mut image = std::fs::read(&path).map_err(|e| format!("no kernels in {}: {e}", path.display()))?;
                if !is_whole(&image) {
                    return Err(format!("no kernels in {}: the file isn't a whole image", path.display()));
                }
                // The driver doesn't get an image's length, and reads what it takes for text up to a 0.
                image.push(0);
                Ok((*file, image.into()))
            };
            FILES.iter().map(read).collect()
        }
        (None, Some(images)) => Ok(images.iter().map(|(file, image)| (*file, Cow::Borrowed(*image))).collect()),
        (None, None) => Err(format!(
            "this build has no CUDA kernels in it, because no nvcc was found: run scripts/install-nvcc.sh (or set \
             NVCC) and build again, or name a folder of *.fatbin files in {VARIABLE}"
        )),
    }
}

/// Whether all that the driver will read of an image is there, as far as that is easily seen: a fatbin tells its
/// length, in a header of its magic number (32 bits), its version and its own length (16 bits each), and the length
/// of what follows (64 bits).
fn is_whole(image: &[u8]) -> bool {
    const MAGIC: [u8; 4] = 0xBA55_ED50u32.to_le_bytes();
    if !image.starts_with(&MAGIC) {
        return image.len() >= MAGIC.len();
    }
    let Some((header, _)) = image.split_first_chunk::<16>() else { return false };
    let own = u64::from(u16::from_le_bytes([header[6], header[7]]));
    let rest = u64::from_le_bytes(*header.last_chunk().expect("16 bytes have a last 8"));
    own.checked_add(rest).is_some_and(|bytes| bytes <= image.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::is_whole;

    #[test]
    fn images_cut_short_are_seen() {
        let image = [&[0x50, 0xED, 0x55, 0xBA, 1, 0, 16, 0, 8, 0, 0, 0, 0, 0, 0, 0][..], &[7; 8]].concat();
        assert!(is_whole(&image) && is_whole(b"PTX or another image"));
        for length in 0..image.len() {
            assert!(!is_whole(&image[..length]), "{length}");
        }
        let endless = [&image[..8], &[0xFF; 8]].concat();
        assert!(!is_whole(&endless));
    }
}
