/*
 * Hash bytes: BLAKE2b to 8 bytes (RFC 7693) for the n-gram search, SHA-256 (FIPS 180-4) for records.
 *
 * In: bytes in the module's memory. Out: digests. A page from the disk has no crypto.subtle, and JavaScript without
 * 64-bit integers needs seconds for the index's 140,000 hashes.
 */
typedef unsigned char Byte;
typedef unsigned int Word;
typedef unsigned long long Long;

#define EXPORT(name) __attribute__((export_name(name)))

/* ---------------------------------------------------------------------------------------------------- BLAKE2b */

static const Long BLAKE_START[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
static const Byte BLAKE_ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static Long turn_right(Long x, int by) { return x >> by | x << (64 - by); }

static void mix(Long *v, int a, int b, int c, int d, Long first, Long second) {
    v[a] += v[b] + first;
    v[d] = turn_right(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = turn_right(v[b] ^ v[c], 24);
    v[a] += v[b] + second;
    v[d] = turn_right(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turn_right(v[b] ^ v[c], 63);
}

/* Hash `length` bytes to 8, without a key. */
EXPORT("blake2b") void blake2b(const Byte *bytes, int length, Word *digest) {
    Long state[8];
    for (int i = 0; i < 8; i++) state[i] = BLAKE_START[i];
    state[0] ^= 0x01010000 ^ 8; /* parameters: no key, a digest of 8 bytes */
    for (int start = 0; start == 0 || start < length; start += 128) {
        int end = start + 128 < length ? start + 128 : length;
        Long input[16], v[16];
        for (int i = 0; i < 16; i++) input[i] = 0;
        for (int i = start; i < end; i++) input[(i - start) / 8] |= (Long)bytes[i] << 8 * ((i - start) % 8);
        for (int i = 0; i < 8; i++) v[i] = state[i], v[i + 8] = BLAKE_START[i];
        v[12] ^= (Long)end;
        if (end == length) v[14] = ~v[14];
        for (int round = 0; round < 12; round++) {
            const Byte *order = BLAKE_ORDER[round % 10];
            for (int i = 0; i < 4; i++) mix(v, i, i + 4, i + 8, i + 12, input[order[2 * i]], input[order[2 * i + 1]]);
            for (int i = 0; i < 4; i++)
                mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, input[order[8 + 2 * i]],
                    input[order[9 + 2 * i]]);
        }
        for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
    }
    digest[0] = (Word)state[0];
    digest[1] = (Word)(state[0] >> 32);
}

/* ---------------------------------------------------------------------------------------------------- SHA-256 */

static const Word SHA_START[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};
static const Word SHA_ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static Word turn_word(Word x, int by) { return x >> by | x << (32 - by); }

static void sha256_block(Word *state, const Byte *block) {
    Word w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = (Word)block[4 * i] << 24 | (Word)block[4 * i + 1] << 16 | (Word)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        Word a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (turn_word(a, 7) ^ turn_word(a, 18) ^ a >> 3) + w[i - 7] +
               (turn_word(b, 17) ^ turn_word(b, 19) ^ b >> 10);
    }
    for (int i = 0; i < 8; i++) v[i] = state[i];
    for (int i = 0; i < 64; i++) {
        Word e = v[4], a = v[0];
        Word first = v[7] + (turn_word(e, 6) ^ turn_word(e, 11) ^ turn_word(e, 25)) + ((e & v[5]) ^ (~e & v[6])) +
                     SHA_ROUND[i] + w[i];
        Word second =
            (turn_word(a, 2) ^ turn_word(a, 13) ^ turn_word(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        for (int k = 7; k > 0; k--) v[k] = v[k - 1];
        v[4] += first;
        v[0] = first + second;
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
}

/* Hash `length` bytes to 32. */
EXPORT("sha256") void sha256(const Byte *bytes, unsigned long length, Byte *digest) {
    Word state[8];
    for (int i = 0; i < 8; i++) state[i] = SHA_START[i];
    unsigned long whole = length / 64 * 64;
    for (unsigned long start = 0; start < whole; start += 64) sha256_block(state, bytes + start);
    Byte rest[128];
    unsigned long left = length - whole, size = left < 56 ? 64 : 128;
    for (unsigned long i = 0; i < size; i++) rest[i] = i < left ? bytes[whole + i] : i == left ? 0x80 : 0;
    for (int i = 0; i < 8; i++) rest[size - 1 - i] = (Byte)((Long)length * 8 >> 8 * i);
    for (unsigned long start = 0; start < size; start += 64) sha256_block(state, rest + start);
    for (int i = 0; i < 32; i++) digest[i] = (Byte)(state[i / 4] >> (24 - 8 * (i % 4)));
}
