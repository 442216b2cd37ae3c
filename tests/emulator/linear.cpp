#ifdef CONSUMERS
#include "hopper.cuh"
#else
#include "ptx.cuh"
#endif
#ifndef FORMAT
#define FORMAT 0
#endif
#ifdef CONSUMERS
#include "../../kernels/linear_sm90.cu"
#define KERNEL linear_sm90
#else
#include "../../kernels/linear.cu"
#define KERNEL linear
#endif
#include <chrono>
namespace emulator { int launch(void (*)(void*), void*, const unsigned*, const unsigned*, size_t, unsigned); }
int main(){
 for (auto s : std::vector<std::vector<int>>{{1,16,16},{130,144,400},{128,128,128},{37,264,1040}}) {
  int rows=s[0],columns=s[1],bytes=s[2];
  std::vector<u8> x(rows*bytes),w(columns*bytes); std::vector<float> rs(rows),cs(columns); std::vector<Bf16> bias(columns),y(rows*columns,Bf16{0x7fff});
  auto fill=[&](std::vector<u8>&v){for(size_t i=0;i<v.size();i++){
#if FORMAT==2
   if(i%2==0){u16 b=to_bf16(rand()/(float)RAND_MAX-0.5f).bits;v[i]=b;v[i+1]=b>>8;}
#elif FORMAT==1
   v[i]=float_to_e4m3(rand()/(float)RAND_MAX*4-2);
#else
   v[i]=rand();
#endif
  }};
  fill(x);fill(w);for(auto&v:rs)v=rand()/(float)RAND_MAX/127;for(auto&v:cs)v=rand()/(float)RAND_MAX/127;for(auto&v:bias)v=to_bf16(rand()/(float)RAND_MAX);
  const u8*xp=x.data(),*wp=w.data();const float*rsp=rs.data(),*csp=cs.data();const Bf16*bp=bias.data();Bf16*yp=y.data();
#ifdef CONSUMERS
  const u64 size=FORMAT==2?2:1;
  TensorMap xm={{(u64)xp,(u64)rows,bytes/size,(u64)bytes,128/size,ROWS,size}},wm={{(u64)wp,(u64)columns,bytes/size,(u64)bytes,128/size,COLUMNS,size}};
  void*args[]={&xm,&wm,&rsp,&csp,&bp,&yp,&rows,&columns,&bytes}; struct C{void**a;}c{args};
  unsigned g[]={2,1,1},b[]={THREADS,1,1}; size_t sh=STAGES*(A_BYTES+B_BYTES)+1024;
#else
  void*args[]={&xp,&wp,&rsp,&csp,&bp,&yp,&rows,&columns,&bytes}; struct C{void**a;}c{args};
  unsigned g[]={(rows+127u)/128,(columns+127u)/128,1},b[]={256,1,1}; size_t sh=3*2*128*128;
#endif
  for(unsigned seed:{0u,1u,7u}){ for(auto&v:y)v=Bf16{0x7fff};
  auto t=std::chrono::steady_clock::now();
  int rc=emulator::launch([](void*p){emulator::call(KERNEL,((C*)p)->a);},&c,g,b,sh,seed);
  double ms=std::chrono::duration<double>(std::chrono::steady_clock::now()-t).count()*1e3;
  double worst=0,most=0;
  for(int i=0;i<rows;i++)for(int j=0;j<columns;j++){double sum=0;
#if FORMAT==2
   for(int k=0;k<bytes;k+=2)sum+=(double)bits_to_float((x[i*bytes+k]|x[i*bytes+k+1]<<8)<<16)*bits_to_float((w[j*bytes+k]|w[j*bytes+k+1]<<8)<<16);
   double want=sum;
#else
   for(int k=0;k<bytes;k++)sum+=
#if FORMAT==1
    (double)e4m3_to_float(x[i*bytes+k])*e4m3_to_float(w[j*bytes+k]);
#else
    (double)((i8)x[i*bytes+k]*(i8)w[j*bytes+k]);
#endif
   double want=sum*rs[i]*cs[j];
#endif
   want+=widen(bias[j]); double e=std::fabs(widen(y[i*columns+j])-want)/(std::fabs(want)+1e-2); if(!(e<=worst))worst=e;}
  printf("format %d %dx%dx%d seed %u: rc %d, worst relative %g, %.0f ms\n",FORMAT,rows,columns,bytes,seed,rc,worst,ms);}
 }
}
