"use strict";
/*
 * Unpack the page's data. In: the base64 text of the data block. Out: the header, and the weights of each checkpoint.
 * `export.py` packs it: zlib(length of the header, header as JSON, then the sections below). Next: decoder.js.
 */

/** Return the header and a function that gives the weights of checkpoint `number`. */
async function unpack(base64) {
  const packed = Uint8Array.from(atob(base64.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(stream).arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  return { header, weightsOf: unpackWeights(header, bytes, 4 + length) };
}

/**
 * Read the weights. A matrix is whole numbers from -127 to 127, times one scale for each row. A checkpoint is stored
 * as the difference of these numbers to the checkpoint before it, modulo 256. Vectors are plain float32.
 */
function unpackWeights(header, bytes, start) {
  const { matrices, vectors, checkpoints } = header;
  const sum = (list) => list.reduce((total, value) => total + value, 0);
  const cells = sum(matrices.map(([, rows, columns]) => rows * columns));
  const scaleCount = sum(matrices.map(([, rows]) => rows));
  const vectorCount = sum(vectors.map(([, count]) => count));
  const floats = (from, count) => new Float32Array(bytes.slice(from, from + 4 * count));
  const scales = floats(start, scaleCount);
  let place = start + 4 * scaleCount;
  let before = new Int8Array(cells);
  const states = checkpoints.map(() => {
    const difference = new Int8Array(bytes, place, cells);
    before = before.map((level, cell) => level + difference[cell]);
    const state = { levels: before, vectors: floats(place + cells, vectorCount) };
    place += cells + 4 * vectorCount;
    return state;
  });
  return (number) => {
    const weights = {};
    let cell = 0;
    let scale = 0;
    for (const [name, rows, columns] of matrices) {
      const matrix = (weights[name] = new Float32Array(rows * columns));
      for (let row = 0; row < rows; row++, scale++) {
        for (let column = 0; column < columns; column++, cell++) {
          matrix[row * columns + column] = states[number].levels[cell] * scales[scale];
        }
      }
    }
    let first = 0;
    for (const [name, count] of vectors) {
      weights[name] = states[number].vectors.subarray(first, (first += count));
    }
    return weights;
  };
}
